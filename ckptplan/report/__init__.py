"""What people look at: made from profiles, plans and records only, so no torch is needed."""
