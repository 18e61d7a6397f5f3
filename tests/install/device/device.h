/* A stranger's header, by a name that one of ours has in its source tree. */
enum { OWN_ANSWER = 42 };
