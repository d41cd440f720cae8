"""Every plugin type of the upstream endpoint picker, and what becomes of it here.

A file of kind `EndpointPickerConfig` names plugins by `type`. This table says for each of them
whether a plugin of ours has that kind, whether our picker does that work anyway, or whether nobody
does it. Names and parameters are those of llm-d-router 0.10 and of what came before it; the rows are
in `upstream_plugins`, `upstream_inputs` and `upstream_past`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.config import epp_input_types, epp_past_types, epp_scheduling_types
from extproc.config.epp_plugin_type import UpstreamType

__all__ = ["TYPES", "UpstreamType"]

#: Upstream name to what becomes of it.
TYPES: Mapping[str, UpstreamType] = MappingProxyType(
    {
        row.name: row
        for row in (*epp_scheduling_types.ROWS, *epp_input_types.ROWS, *epp_past_types.ROWS)
    }
)
