r"""The conversion of each Arrow type to numpy, to Python values and to tensors.

======================  =============================  =========================  ===============================
Arrow                   numpy                          one row, in Python         torch
======================  =============================  =========================  ===============================
integers, floats, bool  the same type                  int, float, bool           the same type (uint16, 32 and 64
                                                                                  become int32, int64 and int64)
text, binary            object array of str, bytes     str, bytes                 list of str, bytes
lists of one length     stacked: (rows, \*shape)        list                       stacked
tensors                 stacked: (rows, \*shape)        array                      stacked
lists of other lengths  object array of arrays         list (where rows were      refused: pad or keep them ragged
                                                       arrays, an array)
struct                  object array of dicts          dict                       dict of columns
decimal                 object array of Decimal        Decimal                    float64
timestamp               datetime64 (UTC)               datetime; in nanoseconds,  int64, nanoseconds since 1970 UTC
                                                       pandas.Timestamp
duration                timedelta64                    timedelta; likewise        int64, nanoseconds
                                                       pandas.Timedelta
time of day             timedelta64 since midnight     time                       int64, nanoseconds since midnight
date                    datetime64[D]                  date                       int64, days since 1970
dictionary, run-end     as its values                  as its values              as its values
extension               as its storage (a tensor       as its storage             as its storage
                        type: stacked)
map                     object array of lists of       list of (key, value)       refused
                        (key, value)
null                    NaN in floats, NaT in times,   None                       refused, naming the row
                        else None in an object array
======================  =============================  =========================  ===============================

The result depends on the values alone, never on the cut of blocks or on the storage of columns.
"""
