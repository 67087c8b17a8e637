"""Where answers of strangers run: enclosed in namespaces, under limits, apart from their judge."""
