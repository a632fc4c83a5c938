"""The application above the services: configuration, composition of the processes, and the command line."""
