"""A model's text side: tokens and characters, chat template, tools, grammars. Free of mlx."""
