"""Variables and records that the commands on both machines share."""

from __future__ import annotations

#: Variables for the command on the cluster: the name of the cluster, and that logs are sent as records.
CLUSTER_VARIABLE, STREAM_VARIABLE = "HPCTRAIN_ON", "HPCTRAIN_STREAM"

#: First character of a line that is a record, not output.
RECORD_START = "\x1e"
