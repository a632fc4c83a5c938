"""The backend port, and what engines that weft starts have in common."""
