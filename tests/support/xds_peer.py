"""Envoy's own types of xDS, with which tests read what extproc serves and write what Envoy says."""

from __future__ import annotations

import warnings

with warnings.catch_warnings():
    # pydantic deprecates a validator style that the generated classes use.
    warnings.filterwarnings("ignore", message=r"Using `@model_validator`")
    from envoy_data_plane.envoy.config.cluster import v3 as clusters  # noqa: F401
    from envoy_data_plane.envoy.config.core import v3 as core  # noqa: F401
    from envoy_data_plane.envoy.config.endpoint import v3 as endpoints  # noqa: F401
    from envoy_data_plane.envoy.extensions.load_balancing_policies.least_request import (  # noqa: F401
        v3 as least_request,
    )
    from envoy_data_plane.envoy.extensions.load_balancing_policies.override_host import (  # noqa: F401
        v3 as override_host,
    )
    from envoy_data_plane.envoy.extensions.upstreams.http import v3 as upstreams  # noqa: F401
    from envoy_data_plane.envoy.service.discovery import v3 as discovery  # noqa: F401
    from envoy_data_plane.envoy.type import v3 as types  # noqa: F401
    from envoy_data_plane.envoy.type.metadata import v3 as metadata  # noqa: F401
    from envoy_data_plane.google.rpc import Status  # noqa: F401
