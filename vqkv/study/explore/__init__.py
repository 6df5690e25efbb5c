"""Notebook 14: what compressed caches do to one conversation, one key and each layer, and controls to try others."""

# ruff: noqa: F401
from vqkv.study.explore.controls import chat, follow
from vqkv.study.explore.views import SYSTEMS, conversation, explained, stages
from vqkv.study.subject import Subject
