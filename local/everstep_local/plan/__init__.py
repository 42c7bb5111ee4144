"""`everstep plan`: what the operator would decide about a job, and why; and the simulated cluster of transcripts."""
