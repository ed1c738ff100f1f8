"""A run in one page: what is known of it, and how that is shown."""
