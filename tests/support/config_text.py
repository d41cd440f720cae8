"""Configurations as text, whose first lines each file would repeat."""

from __future__ import annotations

from extproc.config import loader
from extproc.config.settings import Settings

HEAD = "apiVersion: extproc/v1alpha1\nkind: ExtProcConfig\n"
EPP_HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"


def read(text: str) -> Settings:
    """Settings of a configuration, which is written without its head, in `f.yaml`."""
    return loader.settings(loader.parse(HEAD + text, where="f.yaml"))
