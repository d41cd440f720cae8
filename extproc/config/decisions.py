"""Section `decisions`: what is remembered, reported and recorded of decisions."""

from __future__ import annotations

from typing import Annotated

import msgspec

from extproc.config import validation


class RecordSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Recording of decisions in files, for `extproc replay`, `tune` and `plan`.

    A recording has hashes of prompts and sessions, never their text. The size on disk is at most
    `max_file_bytes` times `max_files`.

    Attributes:
        file: File that is written as JSON lines; when it is full it becomes FILE.1, and that FILE.2.
            A name that ends in `.parquet` is written as Parquet, with the extra `parquet`. No
            default: a recording has a place.
        max_file_bytes: Size of a file (bytes). 256 MiB are half a million requests to a few
            endpoints as JSON lines, and some more as Parquet.
        max_files: Files in total (count). 4, so that a full disk needs other causes.
    """

    file: validation.Name
    max_file_bytes: validation.Positive = 256 * 1024 * 1024
    max_files: Annotated[int, msgspec.Meta(ge=1, le=100)] = 4


class DecisionsSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Recording and reporting of decisions.

    Attributes:
        decisions: Decisions that /debug/decisions and `extproc explain --id` remember (count), and
            as many refused requests; 0 remembers none. 1000 with ten candidates take about 5 MB;
            with many candidates fewer are remembered.
        header: Add a summary of the decision to responses as `x-extproc-decision`. False: it names
            endpoints, which clients need not know.
        metadata: Send that summary to the data plane as dynamic metadata, key `decision` of the
            namespace `extproc`. True: access logs of the shipped Envoy files read it, and clients do
            not get it.
        scores: Send the scores of the endpoints to the data plane, in the dynamic metadata
            `x-gateway-destination-endpoint-scores`. False: only an access log that is configured
            for it reads them.
        record: Recording in files. Null: decisions are not recorded, unless `extproc record` asks
            for them.
    """

    decisions: validation.Count = 1000
    header: bool = False
    metadata: bool = True
    scores: bool = False
    record: RecordSection | None = None
