"""Being here puts this folder on the import path, so that tests share the helpers beside this file."""
