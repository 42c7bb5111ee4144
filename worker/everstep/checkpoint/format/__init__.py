"""The format of a commit in the store: names, records, boxes and checksums. Pure except `chunks`; without torch."""
