"""Annotated types with the ranges of fields, which msgspec enforces."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.request import MAX_NAME_BYTES

Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
PositiveSeconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveMilliseconds = Annotated[float, msgspec.Meta(gt=0)]
PositiveRate = Annotated[float, msgspec.Meta(gt=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Name = Annotated[str, msgspec.Meta(min_length=1)]
#: Name of a model, an adapter or an objective; requests with longer ones are refused.
BoundedName = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_BYTES)]
#: Name of an extra metric.
MetricName = Annotated[str, msgspec.Meta(pattern="^[A-Za-z_][A-Za-z0-9_./-]{0,63}$")]
