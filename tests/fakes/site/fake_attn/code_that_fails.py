raise ImportError("libfake.so.1: cannot open shared object file")
