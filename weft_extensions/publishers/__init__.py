"""Publishers: programs in any language that serve models to the mesh over plain HTTP, each as a runner."""
