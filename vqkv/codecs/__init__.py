"""A tensor -> packed bytes -> a tensor. Knows no model. Importing this registers every part, of all modules here."""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
