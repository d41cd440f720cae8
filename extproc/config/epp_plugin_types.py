"""Table of all plugin types of the upstream endpoint picker, and their treatment here.

A file of kind `EndpointPickerConfig` names plugins by `type`. The status of a type says whether a
plugin of ours has that kind, our picker does the work anyway, or the work is not done. Names and
parameters are those of llm-d-router 0.10 and earlier; the rows are in `epp_scheduling_types`,
`epp_input_types` and `epp_past_types`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from extproc.config import epp_input_types, epp_past_types, epp_scheduling_types
from extproc.config.epp_plugin_type import UpstreamType

__all__ = ["TYPES", "UpstreamType"]

#: Rows by upstream name.
TYPES: Mapping[str, UpstreamType] = MappingProxyType(
    {
        row.name: row
        for row in (*epp_scheduling_types.ROWS, *epp_input_types.ROWS, *epp_past_types.ROWS)
    }
)
