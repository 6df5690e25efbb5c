"""The errors a caller may want to catch. All are ``ValueError``s, so that a plain ``except ValueError`` also works."""

import difflib


class UnknownNameError(ValueError):
    """A model, corpus, preset, profile or parameter name that is not defined."""

    def __init__(self, kind: str, name, defined, remedy: str = ""):
        super().__init__(kind, name, sorted(map(str, defined)), remedy)  # so that it comes back from a worker process

    def __str__(self):
        kind, name, defined, remedy = self.args
        close = difflib.get_close_matches(str(name), defined, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        return f"unknown {kind} {name!r}.{hint} Known: {', '.join(defined)}.{' ' + remedy if remedy else ''}"


class FormatError(ValueError):
    """A file that is truncated, altered, of another version, or made for something else."""


class DamageError(FormatError):
    """A file whose bytes are not those that were written."""


class DataError(ValueError):
    """Numbers that no codec can store faithfully: NaN, infinity, an empty sequence, the wrong number of channels."""
