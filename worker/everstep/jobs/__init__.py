"""Jobs as the commands and the Python client see them: what is asked (`source`), what is answered (`view`), clusters.

Below `everstep.cli` and `everstep.client`; nothing here parses a command, prints or loads the official client before a
cluster is asked.
"""
