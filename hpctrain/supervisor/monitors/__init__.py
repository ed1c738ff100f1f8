"""Watch an attempt from threads of the supervisor, and stop its ranks."""
