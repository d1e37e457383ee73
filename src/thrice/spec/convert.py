"""One given value -> a field's type, strictly; what does not fit says why and what to write."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from difflib import get_close_matches
from fractions import Fraction
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from thrice.spec.dump import toml

_UNITS = {"B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class Flag(str):
    """A value from the command line: text that stands for any type. Commas separate a tuple's elements."""


class Unfit(ValueError):
    """Why a value does not fit its field, and the fix where there is an obvious one."""

    def __init__(self, why: str, fix: str = "") -> None:
        super().__init__(why)
        self.why, self.fix = why, fix


def assign(key: str, value: object, like: object) -> str:
    """How to set `key` to the scalar `value` in the place where `like` was given."""
    if isinstance(like, Flag):
        return f"--{key} {value}"
    return f"{key} = {toml(value)}"


def convert(value: object, hint: Any, key: str) -> Any:
    """`value`, given for `key`, as the type that `hint` names. Raises Unfit.

    int (a `..._bytes` key also takes "512MiB"), float (an int too, finite), bool, str, Literal, tuple (what
    is not a list is one element) and any of them `| None`, for which the word "none" or null is None, or with a
    Literal of words that stand for a value.
    """
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        given: list[Any] = list(arguments)
        if NoneType in given:
            given.remove(NoneType)
        *words, inner = sorted(given, key=_is_no_word)
        if NoneType in arguments and (value is None or (value == "none" and "none" not in get_args(inner))):
            return None
        if words and value in get_args(words[0]):
            return str(value)
        try:
            return convert(value, inner, key)
        except Unfit as unfit:
            raise Unfit(" or ".join([unfit.why, *map(toml, get_args(words[0]) if words else ())]), unfit.fix) from None
    if origin is Literal:
        return _choice(value, arguments, key)
    if origin is tuple:
        return _tuple(value, arguments, key)
    return {int: _int, float: _float, bool: _bool, str: _str}[hint](value, key)


def _is_no_word(hint: Any) -> bool:
    return get_origin(hint) is not Literal


def _choice(value: object, choices: Sequence[object], key: str) -> object:
    for choice in choices:
        if isinstance(value, Flag):
            if value == str(choice):
                return choice
        elif value == choice and type(value) is type(choice):
            return choice
    near = _near(str(value).lower(), {str(choice): choice for choice in choices})
    fix = assign(key, near, value) if near is not None else ""
    raise Unfit(f"{_not(value)}one of {', '.join(map(toml, choices))}", fix)


def _near(given: str, choices: dict[str, object]) -> object:
    """The choice that `given` begins with, or else the most alike: "bf16-mixed" is not "bf16-pure"."""
    begun = [name for name in choices if given.startswith(name.lower())]
    alike = get_close_matches(given, choices, n=1, cutoff=0.5)
    return choices[max(begun, key=len)] if begun else choices[alike[0]] if alike else None


def _tuple(value: object, arguments: Sequence[Any], key: str) -> tuple[Any, ...]:
    elements: list[Any]
    if isinstance(value, Flag):
        elements = [Flag(element.strip()) for element in value.split(",")] if value else []
        if "" in elements:
            raise Unfit("there is nothing between two commas or at an end")
    else:
        elements = list(value) if isinstance(value, (list, tuple)) else [value]
    hints = list(arguments)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        hints = [arguments[0]] * len(elements)
    elif len(elements) != len(hints):
        raise Unfit(f"it needs {len(hints)} values, not {len(elements)}")
    converted = []
    for place, (element, hint) in enumerate(zip(elements, hints, strict=True), start=1):
        try:
            converted.append(convert(element, hint, key))
        except Unfit as unfit:
            # The fix would set the whole field to one element.
            raise Unfit(f"value {place}: {unfit.why}") from None
    return tuple(converted)


def _int(value: object, key: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if key.endswith("_bytes") and isinstance(value, str):
        return _bytes(value)
    number = value
    if isinstance(value, Flag):
        try:
            return int(value)
        except ValueError:
            number = _number(value)
    if isinstance(number, float) and number.is_integer():
        why = f"{_not(value)}a whole number, written without a point or exponent"
        raise Unfit(why, assign(key, int(number), value))
    raise Unfit(f"{_not(value)}a whole number", _unquoted(value, key, int))


def _bytes(text: str) -> int:
    match = re.fullmatch(r"\s*([0-9][0-9_]*(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    if match and (match[2] or "B") in _UNITS:
        size = Fraction(match[1].replace("_", "")) * _UNITS[match[2] or "B"]
        if size.denominator == 1:
            return int(size)
    raise Unfit('it must be a whole number of bytes, or a size such as "512MiB" or "2GB"')


def _float(value: object, key: str) -> float:
    number = _number(value) if isinstance(value, Flag) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        raise Unfit(f"{_not(value)}a number", _unquoted(value, key, float))
    try:
        number = float(number)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise Unfit("it must be a finite number")
    return number


def _bool(value: object, key: str) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, Flag) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise Unfit(f"{_not(value)}true or false")


def _str(value: object, key: str) -> str:
    if not isinstance(value, str):
        fix = assign(key, str(value), value) if isinstance(value, (int, float)) else ""
        raise Unfit(f"{_not(value)}text", fix)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Unfit("it is not valid Unicode, so no file of the run could hold it") from None
    return str(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _unquoted(value: object, key: str, kind: type[int] | type[float]) -> str:
    """The fix for a number written as text in a file."""
    if isinstance(value, str) and not isinstance(value, Flag):
        try:
            number = kind(value)
        except ValueError:
            return ""
        return assign(key, number, value) if math.isfinite(number) else ""
    return ""


def _not(value: object) -> str:
    """The beginning of "X is given, and it must be"; text from the command line has no type of its own."""
    if isinstance(value, Flag):
        return "it must be "
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "text", NoneType: "null"}
    kinds |= {list: "a list", dict: "a table"}
    return f"it is {kinds.get(type(value), type(value).__name__)} and must be "
