"""What is known of a job: derived from a snapshot, with no opinion on what should be done."""
