"""The specification of a job: fields, validation, directives, restart policy."""
