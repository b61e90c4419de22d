"""How commands end: 0 for success, 2 for misuse, 1 for failure, 130 for Ctrl-C; one line on stderr, never a traceback.

With ``--json`` a failed command prints exactly one object on stdout, ``{"error": …}``, besides the line on stderr. A command that
has printed its own object (`verify` and its problems) ends with ``typer.Exit(code)`` instead of an exception.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from erlangen.extras import MissingExtra

#: the user's values, files and packages; everything else is a failure of the work itself
_MISUSE = (ValueError, TypeError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, MissingExtra)


class Misuse(ValueError):
    """The command line does not make sense; the message names the thing, the value and the cure."""


class Polite(TyperGroup):
    """A group of commands that end as this module says."""

    def main(
        self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **extra: Any
    ) -> NoReturn:
        arguments = list(sys.argv[1:] if args is None else args)
        as_json = "--json" in arguments
        extra["standalone_mode"] = False
        try:
            arguments = plugins_first(arguments)
            with warnings.catch_warnings():
                warnings.showwarning = partial(_remark, warnings.showwarning)
                code = super().main(arguments, prog_name, *rest, **extra)
        except (KeyboardInterrupt, typer.Abort):
            code = 130
        except Exception as error:
            if os.environ.get("ERLANGEN_DEBUG"):
                raise
            sys.exit(_end(error, as_json, arguments))
        if code == 130:
            _say("interrupted", as_json)
        sys.exit(code if isinstance(code, int) else 0)


def plugins_first(arguments: list[str]) -> list[str]:
    """``train --plugin mine.py`` is ``--plugin mine.py train``: all commands take it, and it works before any of them."""
    front: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == "--":
            return [*front, *rest, word, *words]
        if word == "--plugin":
            value = next(words, "-")
            if value.startswith("-"):
                raise Misuse("--plugin has no value; give the Python file or module that registers what you wrote")
            front += [word, value]
        elif word.startswith("--plugin="):
            front.append(word)
        else:
            rest.append(word)
    return front + rest


def _remark(usual: Callable[..., None], message: Warning | str, category: type[Warning], *where: Any) -> None:
    """What the library warns of is for the user, who wants neither its file nor its line; other warnings go their way."""
    if category is UserWarning and not os.environ.get("ERLANGEN_DEBUG"):
        print(f"erlangen: note: {message}", file=sys.stderr)
    else:
        usual(message, category, *where)


def _end(error: Any, as_json: bool, arguments: Sequence[str] = ()) -> int:
    if hasattr(error, "format_message") and hasattr(error, "show"):  # the parser's own: an unknown option, a missing argument
        _name_value(error, arguments)
        error.show()  # usage, and where to find help
        if as_json:
            print(json.dumps({"error": error.format_message()}))
        return int(getattr(error, "exit_code", 2))
    _say(_words(error), as_json)
    if type(error).__name__ == "Interrupted":
        return 130
    return 2 if isinstance(error, _MISUSE) else 1


def _name_value(error: Any, arguments: Sequence[str]) -> None:
    """The parser names the option and what it wants, not always what it got."""
    options = getattr(getattr(error, "param", None), "opts", ())
    given = [value for word, value in pairwise(arguments) if word in options]
    given += [word.partition("=")[2] for word in arguments if word.partition("=")[0] in options and "=" in word]
    message = getattr(error, "message", None)
    if given and isinstance(message, str) and repr(given[-1]) not in message:
        error.message = f"{given[-1]!r}: {message}"


def _words(error: Exception) -> str:
    text = str(error).strip()
    if isinstance(error, OSError) and error.filename is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        cure = "; make room, and give the command again (a run goes on with erlangen train --resume RUN)" if full else ""
        return f"{error.filename}: {error.strerror}{cure}"
    if isinstance(error, MemoryError):
        return "out of memory; use a smaller --physical-batch" + (f" ({text})" if text else "")
    if not text or isinstance(error, (KeyError, IndexError, AttributeError, AssertionError)):  # not written for people
        return f"{type(error).__name__}: {text or 'no message'} (this is a bug; ERLANGEN_DEBUG=1 shows where)"
    return text


def _say(text: str, as_json: bool) -> None:
    print(f"erlangen: {text}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": text}))
