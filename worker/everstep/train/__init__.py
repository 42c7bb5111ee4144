"""The training process's side: progress reports. Imports no torch; public names are exported lazily by `everstep`."""
