"""`isthmus doctor`: can these workers train this configuration over these links?"""

from isthmus.tools.doctor.examine import doctor, doctor_on_this_machine

__all__ = ["doctor", "doctor_on_this_machine"]
