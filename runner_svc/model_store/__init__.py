"""The models of a home: files pulled by name, and those that other programs have pulled on this machine."""
