"""The errors a caller may want to catch. All are ``ValueError``s, so that a plain ``except ValueError`` also works."""

import difflib


class UnknownNameError(ValueError):
    """A model, corpus, preset, profile or parameter name that is not defined."""

    def __init__(self, kind: str, name: str, known, remedy: str = ""):
        known = sorted(map(str, known))
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.{' ' + remedy if remedy else ''}")

    def __reduce__(self):  # from a worker process it comes back with its words, not to be put together again
        return _with_words, (type(self), str(self)), self.__dict__  # with its notes


def _with_words(kind: type, words: str):
    error = kind.__new__(kind)
    error.args = (words,)
    return error


class FormatError(ValueError):
    """A file that is truncated, altered, of another version, or made for something else."""


class DamageError(FormatError):
    """A file whose bytes are not those that were written."""


class DataError(ValueError):
    """Numbers that no codec can store faithfully: NaN, infinity, an empty sequence, the wrong number of channels."""
