"""The backend port, and the common parts of engines that weft starts."""
