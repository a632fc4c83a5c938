"""The workbench: the web page of a gateway at `/ui`, its files and what serves them."""
