"""What a commit is in the store, byte by byte: names, records, boxes and checksums. Pure but for `chunks`; no torch."""
