TEXT = "the module runs as rank"
