"""Fixtures that all tests share."""

import pytest
from support import Project


@pytest.fixture
def project(tmp_path):
    """A user's folder with a small task and job."""
    return Project(tmp_path / "project")
