"""What turns that decode computes itself are worth, beside cold prompts and alone."""
