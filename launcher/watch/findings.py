"""How a finding is shown."""

from rung.strategies.findings import Finding, Level


def finding_lines(finding: Finding) -> tuple[str, str]:
    """The text of a finding, and its colour."""
    text = f"{finding.level.value:<10} {finding.subject}: {finding.fact}"
    if finding.level is not Level.OK:
        text += f"\n           {finding.why}" if finding.why else ""
        text += f"\n           → {finding.fix}" if finding.fix else ""
    return text, {Level.ERROR: "red", Level.WARNING: "yellow", Level.OK: ""}[finding.level]
