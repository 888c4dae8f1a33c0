"""One file, one method: the file's name is the method's name in configs and on the command line."""
