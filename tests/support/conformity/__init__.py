"""The two worlds that one suite runs in, what the cases put into them, and the mistakes that the suite must notice."""
