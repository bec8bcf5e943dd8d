"""The types of a job's fields: how a value may be written, and what is wrong with one that may not.

Each parser raises ValueError with a message that names the value and what is expected.
"""

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, GetJsonSchemaHandler, PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import CoreSchema

from rung.launcher.nearest import did_you_mean

LARGEST = 2**63 - 1
MASK = "***"

# torch.optim as of torch 2.6 to 2.13, without L-BFGS, which wants a closure. A test compares it with the real thing.
OPTIMIZERS = (
    "adadelta",
    "adafactor",
    "adagrad",
    "adam",
    "adamax",
    "adamw",
    "asgd",
    "muon",
    "nadam",
    "radam",
    "rmsprop",
    "rprop",
    "sgd",
    "sparseadam",
)
FALLBACK_CHANGES = ("micro_batch", "checkpointing", "strategy", "offload", "devices")


def shown(value: object) -> str:
    """A value as a message shows it: its repr, cut to a readable length."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return f"a number of about {value.bit_length() * 3 // 10} digits"
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer too long to print, somewhere inside
        text = f"a {type(value).__name__}"
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class Every:
    """A rhythm: after each `amount` of `unit`."""

    amount: float
    unit: Literal["epochs", "steps", "minutes"]

    def __str__(self) -> str:
        return f"{self.amount:.15g} {self.unit}"


_UNITS: dict[str, tuple[Literal["epochs", "steps", "minutes"], float]] = {
    "epoch": ("epochs", 1.0),
    "step": ("steps", 1.0),
    "second": ("minutes", 1 / 60),
    "minute": ("minutes", 1.0),
    "hour": ("minutes", 60.0),
}
_EVERY = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:[eE][-+]?[0-9]+)?) *([A-Za-z]+)")
_BYTES = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]*)?) *([KMGT]?I?B)", re.IGNORECASE)


def _every(value: object) -> Every | None:
    if isinstance(value, Every) or value is None or value == "none":
        return value if isinstance(value, Every) else None
    wanted = 'such as "5 epochs", "500 steps", "10 minutes" or none'
    match = _EVERY.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 100 else None
    if match is None:
        raise ValueError(f"{shown(value)} is not a rhythm {wanted}")
    known = _UNITS.get(match[2].lower().removesuffix("s"))
    if known is None:
        raise ValueError(f"{shown(value)}: {match[2]!r} is not a unit; write a rhythm {wanted}")
    unit, factor = known
    amount = float(match[1]) * factor
    if not 0 < amount <= LARGEST:
        raise ValueError(f"{shown(value)} must be more than zero and finite; write none to switch it off")
    if unit == "steps" and amount != int(amount):
        raise ValueError(f"{shown(value)}: steps are whole numbers")
    return Every(amount=amount, unit=unit)


def _bytes(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) and len(value) < 100 else None
    if match is not None:
        size = int(float(match[1]) * _BYTES[match[2].upper()])
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    else:
        raise ValueError(
            f'{shown(value)} is not an amount of memory such as "8 GiB", "500 MB", a number of bytes or auto'
        )
    if not 2**20 <= size <= LARGEST:
        raise ValueError(f'{shown(value)} must be between 1 MiB and 8 EiB; write the unit, as in "8 GiB"')
    return size


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= LARGEST


def _count(value: object) -> int | tuple[int, int] | Literal["auto"]:
    if value == "auto":
        return "auto"
    if _whole(value, 1):
        return value  # type: ignore[return-value]
    if isinstance(value, list | tuple) and len(value) == 2 and all(_whole(v, 1) for v in value):
        return value[0], value[1]
    raise ValueError(f"{shown(value)} is not a count: write auto, a whole number from 1, or [least, most]")


def _range(value: object) -> tuple[int, int]:
    if _whole(value, 1):
        return value, value  # type: ignore[return-value]
    if isinstance(value, list | tuple) and len(value) == 2 and all(_whole(v, 1) for v in value):
        return value[0], value[1]
    raise ValueError(f"{shown(value)} is not a count: write a whole number from 1, or [least, most]")


def _workers(value: object) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if _whole(value, 0):
        return value  # type: ignore[return-value]
    raise ValueError(f"{shown(value)} is not a count: write auto, or a whole number from 0 (in the main process)")


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    """Refuses what JSON cannot hold; the job is stored and sent as JSON."""
    stack: list[tuple[str, object, int]] = [("", values, 0)]
    while stack:
        at, value, depth = stack.pop()
        if depth > 50:
            raise ValueError("is nested deeper than 50 levels")
        if isinstance(value, dict):
            for key, inner in value.items():
                if not isinstance(key, str):
                    raise ValueError(f"{shown(key)} is not a name; keys are text")  # noqa: TRY004  # pydantic collects ValueErrors only
                stack.append((f"{at}{key}: ", inner, depth + 1))
        elif isinstance(value, list):
            stack.extend((at, inner, depth + 1) for inner in value)
        elif isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{at}{shown(value)} is not a finite number")
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ValueError(f"{at}{shown(value)} is too large; at most {LARGEST}")
        elif isinstance(value, str):
            _encodable(value)
        elif value is not None and not isinstance(value, int | float):
            raise ValueError(f"{at}{shown(value)} is not plain text, number, true, false, null, list or mapping")
    return values


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{shown(text)} holds half a character (a lone surrogate)") from None
    return text


def _line(text: str) -> str:
    if not text.strip():
        raise ValueError("is empty")
    if any(ord(c) < 32 or ord(c) == 127 for c in text):
        raise ValueError(f"{shown(text)} holds a control character")
    return _encodable(text)


def entry_point(text: str) -> str:
    module, colon, name = text.partition(":")
    if not (colon and name.isidentifier() and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"{shown(text)} is not module:Class, as in task:MyTask")
    return _encodable(text)


def optimizer_name(text: str) -> str:
    if ":" in text:
        try:
            return entry_point(text)
        except ValueError:
            raise ValueError(f"{shown(text)} is not module:callable, as in my_optimizers:Lion") from None
    if text.lower() not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise ValueError(f"{shown(text)} is none of {known}, nor module:callable{did_you_mean(text, OPTIMIZERS)}")
    return text.lower()


def as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value


def _as_list(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def named(value: object) -> object:
    """`optimizer: sgd` is short for `optimizer: {name: sgd}`."""
    return {"name": value} if isinstance(value, str) else value


def read_fallback(value: object) -> object:
    # YAML 1.1 reads on and off as booleans.
    if isinstance(value, bool):
        return {"enabled": value}
    if isinstance(value, str) and value.lower() in ("on", "off"):
        return {"enabled": value.lower() == "on"}
    if isinstance(value, dict):
        return value
    raise ValueError(f"{shown(value)} is not on, off or {{allow: [...]}}")


@dataclass(frozen=True)
class Or:
    """In the JSON schema: the section may also be written in this short form."""

    short: dict[str, Any]

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"anyOf": [self.short, handler(core)]}


_RHYTHM = {"type": ["string", "null"], "examples": ["5 epochs", "500 steps", "10 minutes", "none"]}
_COUNT: dict[str, Any] = {"type": "integer", "minimum": 1}
_PAIR: dict[str, Any] = {"type": "array", "items": _COUNT, "minItems": 2, "maxItems": 2}

Rhythm = Annotated[
    Every | None,
    PlainValidator(_every),
    PlainSerializer(lambda every: "none" if every is None else str(every)),
    WithJsonSchema(_RHYTHM),
]
Positive = Annotated[int, Field(ge=1, le=LARGEST)]
Natural = Annotated[int, Field(ge=0, le=LARGEST)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Line = Annotated[str, AfterValidator(_line)]
Plain = Annotated[dict[str, Any], AfterValidator(_plain)]
Bytes = Annotated[
    int | Literal["auto"],
    PlainValidator(_bytes),
    WithJsonSchema({"type": ["string", "integer"], "examples": ["auto", "8 GiB", "500 MB"]}),
]
Count = Annotated[
    int | tuple[int, int] | Literal["auto"],
    PlainValidator(_count),
    PlainSerializer(_as_list),
    WithJsonSchema({"anyOf": [{"const": "auto"}, _COUNT, _PAIR]}),
]
Range = Annotated[
    tuple[int, int], PlainValidator(_range), PlainSerializer(_as_list), WithJsonSchema({"anyOf": [_COUNT, _PAIR]})
]
Workers = Annotated[
    int | Literal["auto"],
    PlainValidator(_workers),
    WithJsonSchema({"anyOf": [{"const": "auto"}, {"type": "integer", "minimum": 0}]}),
]
