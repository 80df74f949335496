"""Components as data: from specs to the things that they describe, and back.

A *spec* is `{type: name, **arguments}`: a registered component (or an import path "package.module:Class") and its
constructor's arguments; a component inside a component is a spec again. A checked spec holds every argument, so
that a resolved configuration says everything and changes with no default.
"""

import inspect
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from isthmus.core import Registry, UserError, nearest

Spec = dict[str, Any]


def build(registry: Registry, spec: Mapping[str, Any], **given: Any) -> Any:
    """Return the component that a spec describes; code gives the arguments in `given`, which no configuration has."""
    component, arguments = _read(registry, spec, registry.kind, given)
    return component(**arguments, **given)


def factory(registry: Registry, spec: Mapping[str, Any], *given: str) -> partial[Any]:
    """Return what builds a component that takes further arguments (named in `given`) each time it is made."""
    component, arguments = _read(registry, spec, registry.kind, given)
    return partial(component, **arguments)


def describe(registry: Registry, value: Any) -> Spec:
    """Return the spec of a component that is a dataclass: the inverse of `build`."""
    if not is_dataclass(value):
        raise UserError(f"{value!r} cannot be written into a configuration as {registry.kind}: make it a dataclass")
    values = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    described = {name: describe(registry, item) if is_dataclass(item) else item for name, item in values.items()}
    return {"type": registry.name_of(type(value))} | described


def complete(registry: Registry, spec: Any, path: str, given: tuple[str, ...] = ()) -> Spec:
    """Return the complete, plain form of a spec: every argument, converted to its type.

    Raises:
        UserError: names the argument by its path ("outer.compressor.block") and says what it should be.
    """
    component, arguments = _read(registry, spec, path, given)
    if isinstance(component, type) and is_dataclass(component):  # it refuses combinations that make no sense
        described = describe(registry, component(**arguments)) | {"type": spec["type"]}
        return {name: value for name, value in described.items() if name not in given}
    parameters = _parameters(component, given)
    defaults = {name: _default(p) for name, p in parameters.items() if name not in arguments}
    return {"type": spec["type"]} | {name: (defaults | arguments)[name] for name in parameters}


def _read(registry: Registry, spec: Any, path: str, given: Iterable[str] = ()) -> tuple[Any, Spec]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("type"), str):
        raise UserError(f"{path}: expected {{type: name, ...}} with one of {', '.join(registry.names())}, got {spec!r}")
    component = registry.get(spec["type"])
    values = {name: value for name, value in spec.items() if name != "type"}
    return component, read_arguments(component, values, path, registry, given)


def read_arguments(
    component: Any, values: Mapping[str, Any], path: str, registry: Registry | None = None, given: Iterable[str] = ()
) -> Spec:
    """Return `values` as arguments of a class: all known, none missing, converted to their types."""
    parameters = _parameters(component, given)
    arguments = {}
    for name, value in values.items():
        if name not in parameters:
            raise UserError(f"{path}.{name}: unknown key, {nearest(str(name), list(parameters))}")
        arguments[name] = _argument(value, parameters[name].annotation, f"{path}.{name}", registry)
    for name, parameter in parameters.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise UserError(f"{path}.{name} is missing: it has no default")
    return arguments


def _parameters(component: Any, given: Iterable[str]) -> dict[str, inspect.Parameter]:
    """Return the constructor arguments that a configuration may set, with evaluated annotations."""
    hints = typing.get_type_hints(component if is_dataclass(component) else component.__init__)
    return {
        name: parameter.replace(annotation=hints.get(name, Any))
        for name, parameter in inspect.signature(component).parameters.items()
        if name not in given and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def _default(parameter: inspect.Parameter) -> Any:
    """Return a default as a file would give it back: torch writes 0 for 0.0, and workers compare what they read."""
    try:
        return convert(parameter.default, parameter.annotation, parameter.name)
    except UserError:
        return parameter.default


def _argument(value: Any, annotation: Any, path: str, registry: Registry | None) -> Any:
    """Return the component of a nested spec, or the value converted to its type."""
    is_plain = typing.get_origin(annotation) is dict
    if registry and isinstance(value, Mapping) and "type" in value and not is_plain:
        component, arguments = _read(registry, value, path)
        return component(**arguments)
    if getattr(annotation, "_is_protocol", False):
        raise UserError(f"{path}: expected {{type: name, ...}}, got {value!r}")
    return convert(value, annotation, path)


def convert(value: Any, annotation: Any, path: str) -> Any:
    """Convert `value` to a type, leniently ("3" is an integer).

    Raises:
        UserError: it cannot be converted; the line names `path`.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        raise UserError(sentence(path, error.errors()[0])) from None


def sentence(path: str, error: Any) -> str:
    """Return as a sentence what pydantic says about the value at `path`."""
    message = error["msg"].replace("Input should be", "should be").replace("Value error, ", "")
    return f"{path}: {message}, got {error['input']!r}"
