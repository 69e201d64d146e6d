"""What people see: tables, progress, pictures."""
