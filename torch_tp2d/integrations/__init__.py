"""Other libraries that take a parallel plan or a mesh; each module imports its library itself."""
