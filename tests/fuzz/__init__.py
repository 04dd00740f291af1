"""Coverage-guided fuzzing of all that reads bytes or text which others have made (``make fuzz MINUTES=10``).

``targets`` says what is read, and what holds of it whatever comes; ``__main__`` runs Atheris on one after the other and
keeps what it found in ``corpora``, an archive for each target, which ``test_corpora`` reads again in every test run.
"""
