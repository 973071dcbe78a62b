raise ImportError("this plugin never imports")
