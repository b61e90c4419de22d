"""The broken things themselves: mistakes seen in public code. Which of them are broken is written in `zoo` alone."""
