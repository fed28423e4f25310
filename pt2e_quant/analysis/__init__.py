"""What is looked at afterwards: comparison, sensitivity, search of precisions, profiles, pages."""
