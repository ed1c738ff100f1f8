"""Files of a checkpoint: the manifest, the tensors in torch's DCP format, and the write plan."""
