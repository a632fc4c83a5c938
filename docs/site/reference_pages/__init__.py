"""The reference of the documentation, generated from code: settings, fields, endpoints, errors, metrics and so on."""
