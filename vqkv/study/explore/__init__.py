"""Notebook 14: what a compressed cache does to one prompt, one key and each layer, and controls to try others."""

# ruff: noqa: F401
from vqkv.study.explore.controls import calculator, widgets
from vqkv.study.explore.views import BITS, SYSTEMS, continuation, explained, stages
from vqkv.study.subject import Subject
