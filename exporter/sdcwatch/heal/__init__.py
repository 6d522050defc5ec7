"""`on_fault="heal"`: undo a proven difference inside `backward()`, or say why that would not be sound, and halt."""
