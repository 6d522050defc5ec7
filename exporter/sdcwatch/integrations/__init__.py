"""One line for the libraries that own the loop; each module imports its library only when it is itself imported."""
