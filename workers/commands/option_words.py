"""Errors in the words of the command line: where a field or an argument is refused, the option that was typed.

What checks a setting knows it as a field of a task or an argument of a function, because notebooks, services and task
files give it too. At the command line it is an option, so a refusal says `--colluding-agents`, which can be looked for
in the line just typed. What a file says stays a field of that file: its refusals have lines.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, Final

from labeler.errors import InvalidSetting, LabelerError

ALIASES: Final[Mapping[str, str]] = {
    "sigma_votes": "sigma",
    "max_queries": "queries",
    "memory_limit_bytes": "memory_limit",
    "idempotency_key": "key",
    "images": "queries_shard",
}
"""Fields that are parameters of another name."""


def in_option_words(message: str, options: Mapping[str, str]) -> str:
    """A message with the options of a command for the names of its settings.

    Args:
        options: parameter of the command to the option that sets it, {"colluding_agents": "--colluding-agents"}.
    """
    known = dict(options) | {field: options[name] for field, name in ALIASES.items() if name in options}
    for name, option in known.items():
        # A name of several words is nobody's English; one of a single word only in backquotes, or where fields stand.
        inner = re.escape(name)
        places = [rf"`{inner}`", rf"(?<=refused: ){inner}(?=[:.])", rf"(?<=; ){inner}(?=[:.])"]
        if "_" in name:
            places = [rf"(?<![\w.-]){inner}(?![\w-]|\.\w)", *places]
        else:
            places.append(rf"(?<=\bneeds ){inner}(?=[,;])")
        message = re.sub("|".join(places), option, message)
    return re.sub(r"^(?:task|plan) refused: (?=--)", "", message)


def worded(callback: Callable[..., Any], options: Mapping[str, str]) -> Callable[..., Any]:
    """A command whose errors are told in its own options."""

    @wraps(callback)
    def run(*arguments: Any, **settings: Any) -> Any:
        try:
            return callback(*arguments, **settings)
        except LabelerError as error:
            error.args = (in_option_words(str(error), options), *error.args[1:])
            raise
        except ValueError as error:
            from pydantic import ValidationError

            if not isinstance(error, ValidationError):
                raise
            # What is sent to a service is checked here, too, and an argument may not be what it takes.
            from labeler.settings import describe_validation

            raise InvalidSetting(in_option_words(describe_validation(error, "what was typed"), options)) from None

    return run


def word_errors_of(command: Any) -> None:
    """Have a command, and every command below it, tell its errors in its own options."""
    for inner in getattr(command, "commands", {}).values():
        word_errors_of(inner)
    options = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name
    }
    if command.callback is not None and options:
        command.callback = worded(command.callback, options)
