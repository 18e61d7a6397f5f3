/* A header of a user's program. The library has a header with the same name in its source tree. */
enum { OWN_ANSWER = 42 };
